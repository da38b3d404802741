{{- define "draftd.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "draftd.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "draftd.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "draftd.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "draftd.selectorLabels" -}}
app.kubernetes.io/name: {{ include "draftd.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "draftd.labels" -}}
{{ include "draftd.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "draftd.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default (printf "%s%s" .Chart.AppVersion (ternary "-cuda" "" .Values.gpu.enabled)) .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- /* Where things are in the containers; the same for the service and for engines. */ -}}
{{- define "draftd.socket" -}}/run/draftd/grpc/draftd.sock{{- end -}}
{{- define "draftd.shmRoot" -}}/dev/shm/draftd{{- end -}}

{{- define "draftd.scheme" -}}{{ ternary "https" "http" .Values.http.tls }}{{- end -}}

{{- /* One value as TOML. Numbers arrive as floats, whole ones included. */ -}}
{{- define "draftd.toml" -}}
{{- if kindIs "string" . -}}{{ toJson . }}
{{- else if kindIs "bool" . -}}{{ . }}
{{- else if eq (float64 .) (floor .) -}}{{ int64 . }}
{{- else -}}{{ . }}
{{- end -}}
{{- end -}}

{{- define "draftd.lockedDown" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

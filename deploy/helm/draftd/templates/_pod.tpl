{{- /* What the pods of both modes have in common. */ -}}
{{- define "draftd.podMetadata" -}}
labels:
  {{- include "draftd.labels" . | nindent 2 }}
  {{- with .Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/config: {{ include (print $.Template.BasePath "/configmap.yaml") . | sha256sum }}
  {{- with .Values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "draftd.podSpec" -}}
serviceAccountName: {{ .Values.serviceAccountName }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.runAs.user }}
  runAsGroup: {{ .Values.runAs.group }}
  fsGroup: {{ .Values.runAs.group }}
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- /* The service's container. */ -}}
{{- define "draftd.container" -}}
name: draftd
image: {{ include "draftd.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args: [serve]
env:
  - name: DRAFTD_CONFIG
    value: /etc/draftd/draftd.toml
  {{- if .Values.replicate.servers }}
  # NATS keeps for each name what it has read.
  - name: DRAFTD_NODE_NAME
    valueFrom:
      fieldRef:
        fieldPath: {{ ternary "spec.nodeName" "metadata.name" (eq .Values.mode "daemonset") }}
  {{- end }}
  {{- if and .Values.gpu.enabled (eq .Values.mode "daemonset") }}
  - name: NVIDIA_VISIBLE_DEVICES
    value: {{ .Values.gpu.visibleDevices | quote }}
  - name: NVIDIA_DRIVER_CAPABILITIES
    value: compute,utility
  {{- end }}
  {{- with .Values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - name: http
    containerPort: {{ .Values.http.port }}
    protocol: TCP
  {{- if .Values.tcp.enabled }}
  - name: grpc
    containerPort: {{ .Values.tcp.port }}
    protocol: TCP
  {{- end }}
{{- /* A sidecar that had to be ready would keep its engine from starting and from being reached; engines decode without it. */}}
{{- if eq .Values.mode "daemonset" }}
# Kernels are compiled at the first start, and the corpus is restored.
startupProbe:
  httpGet:
    path: /readyz
    port: http
    scheme: {{ include "draftd.scheme" . | upper }}
  periodSeconds: 2
  failureThreshold: 90
readinessProbe:
  httpGet:
    path: /readyz
    port: http
    scheme: {{ include "draftd.scheme" . | upper }}
  periodSeconds: 5
  timeoutSeconds: 2
{{- end }}
livenessProbe:
  httpGet:
    path: /healthz
    port: http
    scheme: {{ include "draftd.scheme" . | upper }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
resources:
  {{- $resources := deepCopy .Values.resources }}
  {{- if and .Values.gpu.enabled (eq .Values.mode "sidecar") }}
  {{- $_ := set $resources "claims" (list (dict "name" "gpu")) }}
  {{- end }}
  {{- toYaml $resources | nindent 2 }}
securityContext:
  {{- include "draftd.lockedDown" . | nindent 2 }}
volumeMounts:
  - name: config
    mountPath: /etc/draftd
    readOnly: true
  {{- if .Values.tls.secretName }}
  - name: tls
    mountPath: /etc/draftd-tls
    readOnly: true
  {{- end }}
  {{- if .Values.tokens.secretName }}
  - name: tokens
    mountPath: /etc/draftd-tokens
    readOnly: true
  {{- end }}
  {{- if .Values.replicate.secretName }}
  - name: nats
    mountPath: /etc/draftd-nats
    readOnly: true
  {{- end }}
  {{- if ne .Values.data.type "none" }}
  - name: data
    mountPath: /var/lib/draftd
  {{- end }}
  - name: run
    mountPath: /run/draftd
  - name: shm
    mountPath: {{ ternary "/dev/shm" (include "draftd.shmRoot" .) (eq .Values.mode "sidecar") }}
  - name: cache
    mountPath: /var/cache/draftd
  - name: tmp
    mountPath: /tmp
{{- end -}}

{{- /* Volumes of the service that are the same in both modes. */ -}}
{{- define "draftd.volumes" -}}
- name: config
  configMap:
    name: {{ include "draftd.fullname" . }}
{{- with .Values.tls.secretName }}
- name: tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with .Values.tokens.secretName }}
- name: tokens
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with .Values.replicate.secretName }}
- name: nats
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- if eq .Values.data.type "emptyDir" }}
- name: data
  emptyDir: {}
{{- else if eq .Values.data.type "hostPath" }}
- name: data
  hostPath:
    path: {{ .Values.data.hostPath }}
    type: DirectoryOrCreate
{{- else if eq .Values.data.type "claim" }}
- name: data
  persistentVolumeClaim:
    claimName: {{ .Values.data.claim }}
{{- end }}
- name: tmp
  emptyDir:
    sizeLimit: 64Mi
{{- end -}}

from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Transport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPECIFIED: _ClassVar[Transport]
    TRANSPORT_MAPPED: _ClassVar[Transport]
    TRANSPORT_HANDLE: _ClassVar[Transport]
    TRANSPORT_INLINE: _ClassVar[Transport]

class Source(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_UNSPECIFIED: _ClassVar[Source]
    SOURCE_LOCAL: _ClassVar[Source]
    SOURCE_CORPUS: _ClassVar[Source]
    SOURCE_GROUP: _ClassVar[Source]

class Policy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POLICY_UNSPECIFIED: _ClassVar[Policy]
    POLICY_CALIBRATED: _ClassVar[Policy]
    POLICY_TREE: _ClassVar[Policy]

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_INT32: _ClassVar[DataType]
    DATA_TYPE_INT64: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_UINT8: _ClassVar[DataType]
TRANSPORT_UNSPECIFIED: Transport
TRANSPORT_MAPPED: Transport
TRANSPORT_HANDLE: Transport
TRANSPORT_INLINE: Transport
SOURCE_UNSPECIFIED: Source
SOURCE_LOCAL: Source
SOURCE_CORPUS: Source
SOURCE_GROUP: Source
POLICY_UNSPECIFIED: Policy
POLICY_CALIBRATED: Policy
POLICY_TREE: Policy
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_INT32: DataType
DATA_TYPE_INT64: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_UINT8: DataType

class DraftParameters(_message.Message):
    __slots__ = ("k", "max_depth", "spec_factor", "spec_offset", "min_token_prob", "use_local", "use_corpus", "policy", "tau", "branches")
    K_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    SPEC_FACTOR_FIELD_NUMBER: _ClassVar[int]
    SPEC_OFFSET_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKEN_PROB_FIELD_NUMBER: _ClassVar[int]
    USE_LOCAL_FIELD_NUMBER: _ClassVar[int]
    USE_CORPUS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    TAU_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    k: int
    max_depth: int
    spec_factor: float
    spec_offset: float
    min_token_prob: float
    use_local: bool
    use_corpus: bool
    policy: Policy
    tau: float
    branches: int
    def __init__(self, k: _Optional[int] = ..., max_depth: _Optional[int] = ..., spec_factor: _Optional[float] = ..., spec_offset: _Optional[float] = ..., min_token_prob: _Optional[float] = ..., use_local: _Optional[bool] = ..., use_corpus: _Optional[bool] = ..., policy: _Optional[_Union[Policy, str]] = ..., tau: _Optional[float] = ..., branches: _Optional[int] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("tokens", "packed_tokens", "probabilities", "source", "match_length", "occurrences", "parents")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PACKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    MATCH_LENGTH_FIELD_NUMBER: _ClassVar[int]
    OCCURRENCES_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    packed_tokens: bytes
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    source: Source
    match_length: int
    occurrences: int
    parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., packed_tokens: _Optional[bytes] = ..., probabilities: _Optional[_Iterable[float]] = ..., source: _Optional[_Union[Source, str]] = ..., match_length: _Optional[int] = ..., occurrences: _Optional[int] = ..., parents: _Optional[_Iterable[int]] = ...) -> None: ...

class ArrayMap(_message.Message):
    __slots__ = ("name", "offset", "data_type", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    data_type: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ..., data_type: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class BlockMap(_message.Message):
    __slots__ = ("handle", "byte_size", "layout_version", "arrays")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    BYTE_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    handle: str
    byte_size: int
    layout_version: int
    arrays: _containers.RepeatedCompositeFieldContainer[ArrayMap]
    def __init__(self, handle: _Optional[str] = ..., byte_size: _Optional[int] = ..., layout_version: _Optional[int] = ..., arrays: _Optional[_Iterable[_Union[ArrayMap, _Mapping]]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("handle", "offset", "data_type", "shape", "allocation_bytes")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    handle: str
    offset: int
    data_type: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    allocation_bytes: int
    def __init__(self, handle: _Optional[str] = ..., offset: _Optional[int] = ..., data_type: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., allocation_bytes: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("engine", "namespace", "extra_namespaces", "tokenizer_fingerprint", "vocab_size", "device_uuid", "k", "max_rows", "max_length", "transport", "layout_version", "tensors", "unmapped_reason")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    EXTRA_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    UNMAPPED_REASON_FIELD_NUMBER: _ClassVar[int]
    engine: str
    namespace: str
    extra_namespaces: _containers.RepeatedScalarFieldContainer[str]
    tokenizer_fingerprint: str
    vocab_size: int
    device_uuid: str
    k: int
    max_rows: int
    max_length: int
    transport: Transport
    layout_version: int
    tensors: EngineTensors
    unmapped_reason: str
    def __init__(self, engine: _Optional[str] = ..., namespace: _Optional[str] = ..., extra_namespaces: _Optional[_Iterable[str]] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., device_uuid: _Optional[str] = ..., k: _Optional[int] = ..., max_rows: _Optional[int] = ..., max_length: _Optional[int] = ..., transport: _Optional[_Union[Transport, str]] = ..., layout_version: _Optional[int] = ..., tensors: _Optional[_Union[EngineTensors, _Mapping]] = ..., unmapped_reason: _Optional[str] = ...) -> None: ...

class EngineTensors(_message.Message):
    __slots__ = ("tokens", "lengths", "draft_tokens", "draft_probabilities", "draft_info", "device_uuid", "row_indices", "draft_stamp", "parameters")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_INFO_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    ROW_INDICES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STAMP_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    tokens: Tensor
    lengths: Tensor
    draft_tokens: Tensor
    draft_probabilities: Tensor
    draft_info: Tensor
    device_uuid: str
    row_indices: Tensor
    draft_stamp: Tensor
    parameters: DraftParameters
    def __init__(self, tokens: _Optional[_Union[Tensor, _Mapping]] = ..., lengths: _Optional[_Union[Tensor, _Mapping]] = ..., draft_tokens: _Optional[_Union[Tensor, _Mapping]] = ..., draft_probabilities: _Optional[_Union[Tensor, _Mapping]] = ..., draft_info: _Optional[_Union[Tensor, _Mapping]] = ..., device_uuid: _Optional[str] = ..., row_indices: _Optional[_Union[Tensor, _Mapping]] = ..., draft_stamp: _Optional[_Union[Tensor, _Mapping]] = ..., parameters: _Optional[_Union[DraftParameters, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("attachment_id", "lease_ms", "transport", "fallback_reason", "instance", "indexes", "rows", "control", "defaults", "device", "sequence_words")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_REASON_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_WORDS_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    lease_ms: int
    transport: Transport
    fallback_reason: str
    instance: str
    indexes: _containers.RepeatedCompositeFieldContainer[IndexMap]
    rows: BlockMap
    control: BlockMap
    defaults: DraftParameters
    device: DeviceMap
    sequence_words: str
    def __init__(self, attachment_id: _Optional[str] = ..., lease_ms: _Optional[int] = ..., transport: _Optional[_Union[Transport, str]] = ..., fallback_reason: _Optional[str] = ..., instance: _Optional[str] = ..., indexes: _Optional[_Iterable[_Union[IndexMap, _Mapping]]] = ..., rows: _Optional[_Union[BlockMap, _Mapping]] = ..., control: _Optional[_Union[BlockMap, _Mapping]] = ..., defaults: _Optional[_Union[DraftParameters, _Mapping]] = ..., device: _Optional[_Union[DeviceMap, _Mapping]] = ..., sequence_words: _Optional[str] = ...) -> None: ...

class DeviceMap(_message.Message):
    __slots__ = ("device_uuid", "layout_version", "socket", "ticket")
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    device_uuid: str
    layout_version: int
    socket: str
    ticket: str
    def __init__(self, device_uuid: _Optional[str] = ..., layout_version: _Optional[int] = ..., socket: _Optional[str] = ..., ticket: _Optional[str] = ...) -> None: ...

class IndexMap(_message.Message):
    __slots__ = ("namespace", "block")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    block: BlockMap
    def __init__(self, namespace: _Optional[str] = ..., block: _Optional[_Union[BlockMap, _Mapping]] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("attachment_id",)
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    def __init__(self, attachment_id: _Optional[str] = ...) -> None: ...

class DetachResponse(_message.Message):
    __slots__ = ("committed_documents",)
    COMMITTED_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    committed_documents: int
    def __init__(self, committed_documents: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("attachment_id", "extra_namespaces")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    EXTRA_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    extra_namespaces: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, attachment_id: _Optional[str] = ..., extra_namespaces: _Optional[_Iterable[str]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("lease_ms", "indexes", "device")
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    indexes: _containers.RepeatedCompositeFieldContainer[IndexMap]
    device: DeviceMap
    def __init__(self, lease_ms: _Optional[int] = ..., indexes: _Optional[_Iterable[_Union[IndexMap, _Mapping]]] = ..., device: _Optional[_Union[DeviceMap, _Mapping]] = ...) -> None: ...

class Row(_message.Message):
    __slots__ = ("tokens", "packed_tokens", "document_id", "offset", "prompt_length", "namespace", "private", "row_index", "group")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PACKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_FIELD_NUMBER: _ClassVar[int]
    ROW_INDEX_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    packed_tokens: bytes
    document_id: str
    offset: int
    prompt_length: int
    namespace: str
    private: bool
    row_index: int
    group: str
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., packed_tokens: _Optional[bytes] = ..., document_id: _Optional[str] = ..., offset: _Optional[int] = ..., prompt_length: _Optional[int] = ..., namespace: _Optional[str] = ..., private: _Optional[bool] = ..., row_index: _Optional[int] = ..., group: _Optional[str] = ...) -> None: ...

class ProposeRequest(_message.Message):
    __slots__ = ("attachment_id", "rows", "parameters", "packed", "vocab_size", "sequence", "batch")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    rows: _containers.RepeatedCompositeFieldContainer[Row]
    parameters: DraftParameters
    packed: bool
    vocab_size: int
    sequence: int
    batch: int
    def __init__(self, attachment_id: _Optional[str] = ..., rows: _Optional[_Iterable[_Union[Row, _Mapping]]] = ..., parameters: _Optional[_Union[DraftParameters, _Mapping]] = ..., packed: _Optional[bool] = ..., vocab_size: _Optional[int] = ..., sequence: _Optional[int] = ..., batch: _Optional[int] = ...) -> None: ...

class ProposeResponse(_message.Message):
    __slots__ = ("drafts", "versions")
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    drafts: _containers.RepeatedCompositeFieldContainer[Draft]
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, drafts: _Optional[_Iterable[_Union[Draft, _Mapping]]] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class ProposeStreamRequest(_message.Message):
    __slots__ = ("sequence", "request")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    request: ProposeRequest
    def __init__(self, sequence: _Optional[int] = ..., request: _Optional[_Union[ProposeRequest, _Mapping]] = ...) -> None: ...

class ProposeStreamResponse(_message.Message):
    __slots__ = ("sequence", "response", "code", "message")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    response: ProposeResponse
    code: int
    message: str
    def __init__(self, sequence: _Optional[int] = ..., response: _Optional[_Union[ProposeResponse, _Mapping]] = ..., code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class IngestDocument(_message.Message):
    __slots__ = ("document_id", "offset", "tokens", "packed_tokens", "complete", "packed_lead")
    DOCUMENT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PACKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PACKED_LEAD_FIELD_NUMBER: _ClassVar[int]
    document_id: str
    offset: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    packed_tokens: bytes
    complete: bool
    packed_lead: bytes
    def __init__(self, document_id: _Optional[str] = ..., offset: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., packed_tokens: _Optional[bytes] = ..., complete: _Optional[bool] = ..., packed_lead: _Optional[bytes] = ...) -> None: ...

class IngestRequest(_message.Message):
    __slots__ = ("attachment_id", "namespace", "documents", "wait_visible", "vocab_size", "wait_durable")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    WAIT_VISIBLE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    WAIT_DURABLE_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    namespace: str
    documents: _containers.RepeatedCompositeFieldContainer[IngestDocument]
    wait_visible: bool
    vocab_size: int
    wait_durable: bool
    def __init__(self, attachment_id: _Optional[str] = ..., namespace: _Optional[str] = ..., documents: _Optional[_Iterable[_Union[IngestDocument, _Mapping]]] = ..., wait_visible: _Optional[bool] = ..., vocab_size: _Optional[int] = ..., wait_durable: _Optional[bool] = ...) -> None: ...

class DocumentResult(_message.Message):
    __slots__ = ("document_id", "kept_tokens", "total_tokens", "committed")
    DOCUMENT_ID_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    document_id: str
    kept_tokens: int
    total_tokens: int
    committed: bool
    def __init__(self, document_id: _Optional[str] = ..., kept_tokens: _Optional[int] = ..., total_tokens: _Optional[int] = ..., committed: _Optional[bool] = ...) -> None: ...

class IngestResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[DocumentResult]
    def __init__(self, results: _Optional[_Iterable[_Union[DocumentResult, _Mapping]]] = ...) -> None: ...

class HarvestRow(_message.Message):
    __slots__ = ("document_id", "tokens", "packed_tokens", "offset", "row_index", "discard", "length", "prompt_length")
    DOCUMENT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PACKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ROW_INDEX_FIELD_NUMBER: _ClassVar[int]
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    document_id: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    packed_tokens: bytes
    offset: int
    row_index: int
    discard: bool
    length: int
    prompt_length: int
    def __init__(self, document_id: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., packed_tokens: _Optional[bytes] = ..., offset: _Optional[int] = ..., row_index: _Optional[int] = ..., discard: _Optional[bool] = ..., length: _Optional[int] = ..., prompt_length: _Optional[int] = ...) -> None: ...

class HarvestRequest(_message.Message):
    __slots__ = ("attachment_id", "rows", "wait_visible", "wait_durable", "sequence")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WAIT_VISIBLE_FIELD_NUMBER: _ClassVar[int]
    WAIT_DURABLE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    rows: _containers.RepeatedCompositeFieldContainer[HarvestRow]
    wait_visible: bool
    wait_durable: bool
    sequence: int
    def __init__(self, attachment_id: _Optional[str] = ..., rows: _Optional[_Iterable[_Union[HarvestRow, _Mapping]]] = ..., wait_visible: _Optional[bool] = ..., wait_durable: _Optional[bool] = ..., sequence: _Optional[int] = ...) -> None: ...

class HarvestResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[DocumentResult]
    def __init__(self, results: _Optional[_Iterable[_Union[DocumentResult, _Mapping]]] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("name", "vocab_size", "tokenizer_fingerprint", "tokens", "quota_tokens", "documents", "open_documents", "evicted_tokens", "generation", "version", "segments", "bytes", "attachments", "asleep", "calibration")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUOTA_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    OPEN_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENTS_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    vocab_size: int
    tokenizer_fingerprint: str
    tokens: int
    quota_tokens: int
    documents: int
    open_documents: int
    evicted_tokens: int
    generation: int
    version: int
    segments: Segments
    bytes: int
    attachments: int
    asleep: bool
    calibration: Calibration
    def __init__(self, name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., tokens: _Optional[int] = ..., quota_tokens: _Optional[int] = ..., documents: _Optional[int] = ..., open_documents: _Optional[int] = ..., evicted_tokens: _Optional[int] = ..., generation: _Optional[int] = ..., version: _Optional[int] = ..., segments: _Optional[_Union[Segments, _Mapping]] = ..., bytes: _Optional[int] = ..., attachments: _Optional[int] = ..., asleep: _Optional[bool] = ..., calibration: _Optional[_Union[Calibration, _Mapping]] = ...) -> None: ...

class Calibration(_message.Message):
    __slots__ = ("deciles", "brier_score")
    DECILES_FIELD_NUMBER: _ClassVar[int]
    BRIER_SCORE_FIELD_NUMBER: _ClassVar[int]
    deciles: _containers.RepeatedCompositeFieldContainer[Decile]
    brier_score: float
    def __init__(self, deciles: _Optional[_Iterable[_Union[Decile, _Mapping]]] = ..., brier_score: _Optional[float] = ...) -> None: ...

class Decile(_message.Message):
    __slots__ = ("drafted", "predicted", "accepted")
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    drafted: int
    predicted: float
    accepted: float
    def __init__(self, drafted: _Optional[int] = ..., predicted: _Optional[float] = ..., accepted: _Optional[float] = ...) -> None: ...

class Segments(_message.Message):
    __slots__ = ("main", "recent", "live")
    MAIN_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    main: int
    recent: int
    live: int
    def __init__(self, main: _Optional[int] = ..., recent: _Optional[int] = ..., live: _Optional[int] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("namespaces", "store", "replication")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[Namespace]
    store: Store
    replication: Replication
    def __init__(self, namespaces: _Optional[_Iterable[_Union[Namespace, _Mapping]]] = ..., store: _Optional[_Union[Store, _Mapping]] = ..., replication: _Optional[_Union[Replication, _Mapping]] = ...) -> None: ...

class Store(_message.Message):
    __slots__ = ("bytes", "pending_documents", "lag_ms", "failure", "restored_documents", "restored_tokens", "damaged_documents")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PENDING_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    LAG_MS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    RESTORED_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    pending_documents: int
    lag_ms: int
    failure: str
    restored_documents: int
    restored_tokens: int
    damaged_documents: int
    def __init__(self, bytes: _Optional[int] = ..., pending_documents: _Optional[int] = ..., lag_ms: _Optional[int] = ..., failure: _Optional[str] = ..., restored_documents: _Optional[int] = ..., restored_tokens: _Optional[int] = ..., damaged_documents: _Optional[int] = ...) -> None: ...

class Replication(_message.Message):
    __slots__ = ("stream", "node", "connected", "failure", "warning", "lag_messages", "outbox_documents", "outbox_age_ms", "published_documents", "consumed_documents", "duplicate_documents", "refused_messages")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    LAG_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    OUTBOX_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    OUTBOX_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    stream: str
    node: str
    connected: bool
    failure: str
    warning: str
    lag_messages: int
    outbox_documents: int
    outbox_age_ms: int
    published_documents: int
    consumed_documents: int
    duplicate_documents: int
    refused_messages: int
    def __init__(self, stream: _Optional[str] = ..., node: _Optional[str] = ..., connected: _Optional[bool] = ..., failure: _Optional[str] = ..., warning: _Optional[str] = ..., lag_messages: _Optional[int] = ..., outbox_documents: _Optional[int] = ..., outbox_age_ms: _Optional[int] = ..., published_documents: _Optional[int] = ..., consumed_documents: _Optional[int] = ..., duplicate_documents: _Optional[int] = ..., refused_messages: _Optional[int] = ...) -> None: ...

class GetNamespaceRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    def __init__(self, namespace: _Optional[str] = ...) -> None: ...

class GetNamespaceResponse(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: Namespace
    def __init__(self, namespace: _Optional[_Union[Namespace, _Mapping]] = ...) -> None: ...

class DropNamespaceRequest(_message.Message):
    __slots__ = ("namespace", "force")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    force: bool
    def __init__(self, namespace: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class DropNamespaceResponse(_message.Message):
    __slots__ = ("documents", "tokens")
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    documents: int
    tokens: int
    def __init__(self, documents: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class AdvanceGenerationRequest(_message.Message):
    __slots__ = ("namespace", "keep_generations")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEEP_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    keep_generations: int
    def __init__(self, namespace: _Optional[str] = ..., keep_generations: _Optional[int] = ...) -> None: ...

class AdvanceGenerationResponse(_message.Message):
    __slots__ = ("generation", "evicted_tokens")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EVICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    evicted_tokens: int
    def __init__(self, generation: _Optional[int] = ..., evicted_tokens: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("namespace", "tokens", "packed_tokens", "parameters", "limit")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PACKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    packed_tokens: bytes
    parameters: DraftParameters
    limit: int
    def __init__(self, namespace: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., packed_tokens: _Optional[bytes] = ..., parameters: _Optional[_Union[DraftParameters, _Mapping]] = ..., limit: _Optional[int] = ...) -> None: ...

class SuffixMatch(_message.Message):
    __slots__ = ("source", "length", "occurrences", "next_tokens", "distinct_next_tokens", "documents", "draft", "score")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    OCCURRENCES_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISTINCT_NEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    source: Source
    length: int
    occurrences: int
    next_tokens: _containers.RepeatedCompositeFieldContainer[NextToken]
    distinct_next_tokens: int
    documents: _containers.RepeatedCompositeFieldContainer[DocumentMatch]
    draft: _containers.RepeatedScalarFieldContainer[int]
    score: float
    def __init__(self, source: _Optional[_Union[Source, str]] = ..., length: _Optional[int] = ..., occurrences: _Optional[int] = ..., next_tokens: _Optional[_Iterable[_Union[NextToken, _Mapping]]] = ..., distinct_next_tokens: _Optional[int] = ..., documents: _Optional[_Iterable[_Union[DocumentMatch, _Mapping]]] = ..., draft: _Optional[_Iterable[int]] = ..., score: _Optional[float] = ...) -> None: ...

class NextToken(_message.Message):
    __slots__ = ("token", "count")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    token: int
    count: int
    def __init__(self, token: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class DocumentMatch(_message.Message):
    __slots__ = ("document_id", "position", "generation")
    DOCUMENT_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    document_id: str
    position: int
    generation: int
    def __init__(self, document_id: _Optional[str] = ..., position: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("matches", "draft", "version", "candidates", "calibration")
    MATCHES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    matches: _containers.RepeatedCompositeFieldContainer[SuffixMatch]
    draft: Draft
    version: int
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    calibration: Calibration
    def __init__(self, matches: _Optional[_Iterable[_Union[SuffixMatch, _Mapping]]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., version: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., calibration: _Optional[_Union[Calibration, _Mapping]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("token", "probability")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    token: int
    probability: float
    def __init__(self, token: _Optional[int] = ..., probability: _Optional[float] = ...) -> None: ...

class ExportRequest(_message.Message):
    __slots__ = ("namespace", "ids_only")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    IDS_ONLY_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    ids_only: bool
    def __init__(self, namespace: _Optional[str] = ..., ids_only: _Optional[bool] = ...) -> None: ...

class ExportResponse(_message.Message):
    __slots__ = ("documents", "total_documents", "vocab_size", "tokenizer_fingerprint", "generation")
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    documents: _containers.RepeatedCompositeFieldContainer[StoredDocument]
    total_documents: int
    vocab_size: int
    tokenizer_fingerprint: str
    generation: int
    def __init__(self, documents: _Optional[_Iterable[_Union[StoredDocument, _Mapping]]] = ..., total_documents: _Optional[int] = ..., vocab_size: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class StoredDocument(_message.Message):
    __slots__ = ("document_id", "packed_tokens", "generation", "committed_us")
    DOCUMENT_ID_FIELD_NUMBER: _ClassVar[int]
    PACKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_US_FIELD_NUMBER: _ClassVar[int]
    document_id: str
    packed_tokens: bytes
    generation: int
    committed_us: int
    def __init__(self, document_id: _Optional[str] = ..., packed_tokens: _Optional[bytes] = ..., generation: _Optional[int] = ..., committed_us: _Optional[int] = ...) -> None: ...

class ImportRequest(_message.Message):
    __slots__ = ("namespace", "vocab_size", "tokenizer_fingerprint", "documents")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    vocab_size: int
    tokenizer_fingerprint: str
    documents: _containers.RepeatedCompositeFieldContainer[StoredDocument]
    def __init__(self, namespace: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., documents: _Optional[_Iterable[_Union[StoredDocument, _Mapping]]] = ...) -> None: ...

class ImportResponse(_message.Message):
    __slots__ = ("documents", "tokens", "skipped_documents", "durable")
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    documents: int
    tokens: int
    skipped_documents: int
    durable: bool
    def __init__(self, documents: _Optional[int] = ..., tokens: _Optional[int] = ..., skipped_documents: _Optional[int] = ..., durable: _Optional[bool] = ...) -> None: ...

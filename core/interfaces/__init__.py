"""The contracts: one file a seam, plus the records that cross seams. Importing this loads no torch."""

from dovetail.core.interfaces.activation import PLAIN, ActFormat, Activation, Bundle, Partial
from dovetail.core.interfaces.app import App
from dovetail.core.interfaces.attention import (
    AttentionBackend,
    AttentionLayer,
    AttnCtx,
    BatchMeta,
    HostBounds,
    KVPool,
    QKNorm,
    Rope,
)
from dovetail.core.interfaces.collective import Collective
from dovetail.core.interfaces.cost import CostModel
from dovetail.core.interfaces.executor import Blobs, Executor, ExecutorInfo, JoinBlob, Progress
from dovetail.core.interfaces.kv_cache import Hit, KVAllocator, KVGroup, KVSequence, KVStats, PageEntry, Plane, Reservation
from dovetail.core.interfaces.logits import LogitsContext, LogitsProcessor
from dovetail.core.interfaces.model import (
    MLA,
    BuildContext,
    ForwardContext,
    Hidden,
    Model,
    ModelSource,
    ModelSpec,
    MoE,
    Parameters,
)
from dovetail.core.interfaces.observer import Observer, StepRecord
from dovetail.core.interfaces.plan import HostDraft, Join, PageDelta, PageOp, PageOpKind, Row, RowFlag, StepPlan
from dovetail.core.interfaces.quant import LinearMethod, LinearShape, Quantizer
from dovetail.core.interfaces.records import (
    FinishReason,
    Request,
    RowResult,
    SamplingParams,
    Sequence,
    Status,
    StepResult,
    TokenLogprobs,
)
from dovetail.core.interfaces.scheduler import Scheduler, SchedulerContext, SchedulerLimits, SchedulerStats
from dovetail.core.interfaces.spec_decode import Draft, Drafter, DraftContext, TargetView

__all__ = [
    "MLA",
    "PLAIN",
    "ActFormat",
    "Activation",
    "App",
    "AttentionBackend",
    "AttentionLayer",
    "AttnCtx",
    "BatchMeta",
    "Blobs",
    "BuildContext",
    "Bundle",
    "Collective",
    "CostModel",
    "Draft",
    "DraftContext",
    "Drafter",
    "Executor",
    "ExecutorInfo",
    "FinishReason",
    "ForwardContext",
    "Hidden",
    "Hit",
    "HostBounds",
    "HostDraft",
    "Join",
    "JoinBlob",
    "KVAllocator",
    "KVGroup",
    "KVPool",
    "KVSequence",
    "KVStats",
    "LinearMethod",
    "LinearShape",
    "LogitsContext",
    "LogitsProcessor",
    "MoE",
    "Model",
    "ModelSource",
    "ModelSpec",
    "Observer",
    "PageDelta",
    "PageEntry",
    "PageOp",
    "PageOpKind",
    "Parameters",
    "Partial",
    "Plane",
    "Progress",
    "QKNorm",
    "Quantizer",
    "Request",
    "Reservation",
    "Rope",
    "Row",
    "RowFlag",
    "RowResult",
    "SamplingParams",
    "Scheduler",
    "SchedulerContext",
    "SchedulerLimits",
    "SchedulerStats",
    "Sequence",
    "Status",
    "StepPlan",
    "StepRecord",
    "StepResult",
    "TargetView",
    "TokenLogprobs",
]

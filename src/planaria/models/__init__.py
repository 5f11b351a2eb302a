"""Models as plain modules: `forward(dense_features, sparse_features)` gives logits [B]."""

from planaria.models.dcn_v2 import DCNv2
from planaria.models.deepfm import DeepFM
from planaria.models.dlrm import DLRM
from planaria.models.registry import MODELS, load_model
from planaria.models.wide_and_deep import WideAndDeep

__all__ = ["DLRM", "MODELS", "DCNv2", "DeepFM", "WideAndDeep", "load_model"]

"""torchvision's models beside a torch that has no CUDA.

The registry's torchvision is built for CUDA, and its compiled operations do not load beside a torch
for the CPU: the import ends with "operator torchvision::nms does not exist". Its models need none
of them. So what the import asks for is defined here first, without a body.
"""

from importlib.util import find_spec

import torch

HOW = (
    "torchvision is not installed: in an environment of its own, for other libraries would import "
    "it and fail, pip install --no-deps torchvision==0.28.0"
)
BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def prepare() -> torch.library.Library | None:
    """Makes `import torchvision` possible; keep what it returns. Raises ImportError with a sentence
    where torchvision is not installed.
    """
    if find_spec("torchvision") is None:
        raise ImportError(HOW)
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(name + BOXES)
    return library

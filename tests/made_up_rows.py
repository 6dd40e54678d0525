"""A published run that nobody published: Llama 3 8B on 64 H100."""

from howdah.validation.rows import NEEDED, Row

LLAMA = {
    **dict.fromkeys(NEEDED, ""),
    "id": "r1",
    "source": "a table",
    "quality": "A",
    "framework": "NeMo",
    "model": "Llama3 8B",
    "seq": "8192",
    "gpu": "H100-80GB-SXM",
    "gpu_count": "64",
    "gpus_per_node": "8",
    "dp": "16",
    "tp": "2",
    "pp": "2",
    "cp": "1",
    "ep": "1",
    "zero": "1",
    "sp": "1",
    "vpp": "1",
    "recompute": "none",
    "flash_attn": "1",
    "mbs": "1",
    "ga": "8",
    "gbs": "128",
    "precision": "BF16",
    "iter_time_s": "4.5",
}


def row(**changes):
    """The run with other columns."""
    return Row({**LLAMA, **changes})

"""The numbers of a layout's spelling: what each means, and the largest that is allowed."""

from howdah.machines.cluster import WORLD

MEANING = {
    "pp": "pipeline stages (pp4)",
    "dp": "replicas (dp2, or dp* for the rest)",
    "cp": "parts of each sequence (cp2)",
    "tp": "parts of each matrix (tp2)",
    "ep": "ranks that share out the experts (ep4)",
    "zero": "what replicas share out (zero1: optimizer, zero2: gradients too, zero3: weights too)",
    "shard": "replicas that share out one copy of the states (shard8)",
    "hpz": "ranks of a node that share out a second copy of zero3's weights (hpz4)",
    "server": "parameter servers beside the replicas (server2)",
    "v": "stages on each pipeline rank (v2)",
    "x": "micro-batches per step (x4)",
    "slices": "token slices of each micro-batch (slices4)",
}
# The largest allowed value of each number, above those of any real machine or run.
MOST = {
    "pp": 256,
    "dp": WORLD,
    "cp": 4096,
    "tp": 1024,
    "ep": 4096,
    "zero": 3,
    "shard": WORLD,
    "hpz": WORLD,
    "server": 1024,
    "v": 256,
    "x": 1 << 14,
    "slices": 1024,
}

SHORT = {"v": "virtual", "x": "micros"}  # words that are not called as their fields
NUMBERS = {word: SHORT.get(word, word) for word in MEANING}

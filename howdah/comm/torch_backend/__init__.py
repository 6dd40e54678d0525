"""What torch.distributed calls when its backend is howdah (`comm/backend.py` registers it)."""

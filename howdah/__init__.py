"""howdah: plan, verify, train and resume transformer language models on many devices."""

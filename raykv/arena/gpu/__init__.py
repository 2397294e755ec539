"""The bytes of one GPU: its memory as an arena, and copies between GPUs and host memory."""

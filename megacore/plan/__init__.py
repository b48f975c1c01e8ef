"""What a run needs before it starts: memory, time, processes. Nothing here imports torch."""

"""How messages travel between ranks: threads, MPI, NCCL, and memory of GPUs that peers reach."""

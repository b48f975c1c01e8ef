"""Token files in the format of Megatron's indexed dataset: `.bin` and `.idx`."""

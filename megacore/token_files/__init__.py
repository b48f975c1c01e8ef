"""Token files in the form of Megatron's indexed dataset: `.bin` and `.idx`."""

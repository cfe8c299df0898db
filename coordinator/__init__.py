"""The coordinator: runs rounds between sites that it need not be trusted by. Never imports torch."""

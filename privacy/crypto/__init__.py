"""The primitives of secure aggregation: canonical bytes, signatures, key agreement, sharing, seals and masks."""

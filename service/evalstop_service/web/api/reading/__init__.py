"""Decoding of request bodies and streams: hostile bytes in, typed values or a refusal out."""

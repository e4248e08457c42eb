"""From text to rows and back: tokenizers, packing into the one row format, resumable input."""

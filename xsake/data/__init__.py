"""From files to batches: text, documents, token files, the stream of batches."""

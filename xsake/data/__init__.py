"""From files to batches, for calibration, evaluation and training.

.txt, .jsonl (.gz, .xz, .zst)
    │ text.documents                                 strings
    ├─ documents.load_documents ─ [length] each      calibration, evaluation
    │    (tokenizer.encode)      └─ tasks.make_prompts, recall_documents: answers hidden in them
    └─ tokens.tokenize ─ TokenDataset ─ stream.Stream ─ Batch [B, T]: training
         (tokenizer)     a folder    windows
"""

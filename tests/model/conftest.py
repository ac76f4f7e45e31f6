collect_ignore = ["fixtures/make.py"]  # a program that needs torch

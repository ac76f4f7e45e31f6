collect_ignore = ["fixtures/levanter.py"]  # a program that needs levanter

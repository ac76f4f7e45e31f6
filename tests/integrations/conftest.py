collect_ignore = ["fixtures/easydel.py", "fixtures/levanter.py"]  # they need their package

collect_ignore = ["fixtures/easydel.py", "fixtures/levanter.py"]  # programs that need those packages

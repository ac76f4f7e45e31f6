# they need their package
collect_ignore = [f"fixtures/{x}.py" for x in ("easydel", "easydel_model", "levanter")]

"""What `xsake bench --suite NAME` measures, a module each."""

"""XSAKE's attention behind the interfaces of other libraries, a module for each."""

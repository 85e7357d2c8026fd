"""Contract tests for plug-ins: subclass one, say how to make the object, and run pytest.

Only this package imports pytest, which is not a dependency of `tnetcli`.
"""

"""Benchmarks: they time modes in turns, divide rounds into stages, and compare ways to decode. Start with
`methods.py`."""

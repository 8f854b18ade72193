"""The laboratory: experiments, pictures, compiled programs, theory. The library imports nothing of it; `hsd` does."""

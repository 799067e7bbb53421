"""The parts of `engines.sglang.diffuser`: SGLang's `DiffGenerator` and its scheduler processes."""

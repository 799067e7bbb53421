"""How far SGLang's processes have loaded a model, as it can be seen from outside of them."""

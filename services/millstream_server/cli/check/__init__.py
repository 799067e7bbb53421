"""`millstream check`: does a deployment work, up to a real answer of each of its models?"""

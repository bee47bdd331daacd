"""The MinatoLoader paper's workloads as chains of transforms, and real data to put through them."""

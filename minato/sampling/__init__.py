"""Where keys come from: samplers, their passes, and what is known of the next one."""

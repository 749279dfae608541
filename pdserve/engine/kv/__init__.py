"""The KV pool, the formats that it stores, and the definition of a block's checksum."""

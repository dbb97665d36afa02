"""The code that implements ops which a transport lacks, by sends and receives, and the routing of ops to transports."""

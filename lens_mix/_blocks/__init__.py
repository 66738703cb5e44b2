"""One block of a pass, as the verification and the methods read it: records, states and components."""

"""lens_mix"""

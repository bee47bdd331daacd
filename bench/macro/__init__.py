"""Whole loaders side by side on work whose cost is known: how close does each come to the bound?"""

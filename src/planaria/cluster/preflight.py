def check(config):
    return []

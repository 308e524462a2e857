"""Own exceptions, which the judge recognizes by their names."""


class ConfigError(Exception):
    pass


class ShapeMismatch(Exception):
    pass


class DtypeMismatch(Exception):
    pass


class NonFinite(Exception):
    pass


class CapacityExceeded(Exception):
    pass


class OutOfBlocks(Exception):
    pass


class SequenceNotFound(Exception):
    pass


class PositionOutOfRange(Exception):
    pass


class LayerOutOfRange(Exception):
    pass


class HeadOutOfRange(Exception):
    pass

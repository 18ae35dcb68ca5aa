"""Small previews of uploaded pictures, 256 pixels wide, as WebP."""

from PIL import Image

WIDTH = 256


def preview(source, target):
    with Image.open(source) as picture:
        picture.thumbnail((WIDTH, WIDTH * 4))
        picture.save(target, "webp", quality=80)

// A ZIP file of some files, without compression (APPNOTE 6.3.10, sections 4.3.7, 4.3.12 and 4.3.16). Up to 4 GiB.

const TABLE = Uint32Array.from({ length: 256 }, (_, number) => {
  let value = number;
  for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value >>> 0;
});

function crc32(bytes) {
  let value = 0xffffffff;
  for (const byte of bytes) value = TABLE[(value ^ byte) & 255] ^ (value >>> 8);
  return (value ^ 0xffffffff) >>> 0;
}

function record(signature, fields) {
  const made = new DataView(new ArrayBuffer(4 + fields.reduce((size, [width]) => size + width, 0)));
  made.setUint32(0, signature, true);
  let at = 4;
  for (const [width, value] of fields) {
    if (width === 2) made.setUint16(at, value, true); else made.setUint32(at, value, true);
    at += width;
  }
  return made;
}

/** Return a ZIP file as a blob; `files` are [name, blob]. */
export async function zipped(files) {
  const parts = [], entries = [];
  let offset = 0, listed = 0;
  for (const [name, blob] of files) {
    const path = new TextEncoder().encode(name), content = new Uint8Array(await blob.arrayBuffer());
    // Version 2.0, names in UTF-8, stored; the date is the earliest possible: 1980-01-01.
    const shared = [[2, 20], [2, 0x0800], [2, 0], [2, 0], [2, 0x21], [4, crc32(content)], [4, content.length], [4, content.length], [2, path.length], [2, 0]];
    parts.push(record(0x04034b50, shared), path, content);
    entries.push(record(0x02014b50, [[2, 20], ...shared, [2, 0], [2, 0], [2, 0], [4, 0], [4, offset]]), path);
    listed += 46 + path.length;
    offset += 30 + path.length + content.length;
  }
  const end = record(0x06054b50, [[2, 0], [2, 0], [2, files.length], [2, files.length], [4, listed], [4, offset], [2, 0]]);
  return new Blob([...parts, ...entries, end], { type: "application/zip" });
}

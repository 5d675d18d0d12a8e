-- Stored files: in pieces, until they are claimed. Keys: the file, a hash number -> bytes, 'size' once it is whole.

-- lay_by: write a piece of a file that expires, unless it is whole already. An incomplete file always expires.
-- KEYS the file.  ARGV ttl_ms, number of the piece or 'size', its bytes or the size.  returns {'kept'} {'there'}
local function lay_by(keys, args)
  if redis.call('HEXISTS', keys[1], 'size') == 1 then return {'there'} end
  redis.call('HSET', keys[1], args[2], args[3])
  redis.call('PEXPIRE', keys[1], args[1])
  return {'kept'}
end

-- claim_file: remove the expiry of a whole file.  KEYS the file.  returns {'claimed'} {'missing'}
local function claim_file(keys)
  if redis.call('HEXISTS', keys[1], 'size') == 0 then return {'missing'} end
  redis.call('PERSIST', keys[1])
  return {'claimed'}
end

redis.register_function('deck_lay_by', lay_by)
redis.register_function('deck_claim_file', claim_file)

-- Stored files: in pieces, until somebody claims them. Keys: the file, a hash number -> bytes, 'size' once it is whole.

-- lay_by: write a piece of a file that expires, unless it is whole already. What is not whole has an end.
-- KEYS the file.  ARGV ttl_ms, number of the piece, or 'size', its bytes, or how many there are.  returns {'kept'} {'there'}
local function lay_by(keys, args)
  if redis.call('HEXISTS', keys[1], 'size') == 1 then return {'there'} end
  redis.call('HSET', keys[1], args[2], args[3])
  redis.call('PEXPIRE', keys[1], args[1])
  return {'kept'}
end

-- claim_file: let a whole file stay.  KEYS the file.  returns {'claimed'} {'missing'}
local function claim_file(keys)
  if redis.call('HEXISTS', keys[1], 'size') == 0 then return {'missing'} end
  redis.call('PERSIST', keys[1])
  return {'claimed'}
end

redis.register_function('deck_lay_by', lay_by)
redis.register_function('deck_claim_file', claim_file)

-- Secrets: whether a writer knows every value that it has to hide.
-- Keys:  conversation base  :secrets  hash   :masked  set  every value, encrypted   :secrets_of  string  the lender

local secrets = {}

-- Whether a writer knows every value that it has to hide. Values are only added, so their number says it, and one of
-- them that it belongs to this life of the id: each is encrypted with its own nonce. Those of a conversation that borrows
-- another one's may be in another slot: its writers look them up.
function secrets.are_known(base, count, sample)
  local masked, lender = base .. ':masked', base .. ':secrets_of'
  if count == 0 then return redis.call('EXISTS', masked, lender) == 0 end
  return redis.call('SCARD', masked) == count and redis.call('SISMEMBER', masked, sample or '') == 1
    and redis.call('EXISTS', lender) == 0
end

-- What is kept of the secrets: {current values by name, every value, the lender or ''}; {} where there are none.
function secrets.read(base)
  local masked, lender = base .. ':masked', base .. ':secrets_of'
  if redis.call('EXISTS', masked, lender) == 0 then return {} end
  return {redis.call('HGETALL', base .. ':secrets'), redis.call('SMEMBERS', masked), redis.call('GET', lender) or ''}
end

return secrets

// Package sshkeys reads what OpenSSH keeps in files, and says whom a client's key or
// certificate names: host keys, authorized_keys, and the CAs of users.
//
//	keys, mistakes := sshkeys.ParseAuthorizedKeys(content)
//	ca, err := sshkeys.ParseUserCA(text, "spiffe://corp.example/ssh/{principal}")
//	a := &sshkeys.Authority{Keys: keys, CAs: []*sshkeys.UserCA{ca}}
//	grant, err := a.Check("alice", key, from, time.Now())
//
// Of the options of a key it knows permitlisten, permitopen, from and expiry-time. A key with
// any other option is refused: an option restricts, and one that nobody heeds would give more
// than was meant. It opens no file.
package sshkeys

package sshkeys

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"

	"culvert.dev/identity"
	"culvert.dev/tunnel"
)

// placeholder is what a UserCA's template has for the principal.
const placeholder = "{principal}"

// A UserCA is a CA whose certificates name users.
type UserCA struct {
	keys [][]byte // on the wire
	id   string   // template of IDs
}

// ParseUserCA reads the public keys of a CA, one on each line, and the template of the IDs
// that its users get: "{principal}" in it stands for the principal of the certificate.
func ParseUserCA(text, id string) (*UserCA, error) {
	if err := CheckID(id); err != nil {
		return nil, err
	}
	ca := &UserCA{id: id}
	n := 0
	for line := range strings.Lines(text) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		key, _, options, _, err := ssh.ParseAuthorizedKey([]byte(line))
		switch {
		case err != nil:
			return nil, fmt.Errorf("line %d is not a public key of OpenSSH", n)
		case len(options) > 0:
			return nil, fmt.Errorf("line %d has options, which the key of a CA can't have here", n)
		}
		if err := checkKey(key); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		ca.keys = append(ca.keys, key.Marshal())
	}
	if len(ca.keys) == 0 {
		return nil, errors.New("there is no key")
	}
	return ca, nil
}

// CheckID returns what is wrong with the template of IDs of a CA.
func CheckID(id string) error {
	if strings.Count(id, placeholder) != 1 {
		return fmt.Errorf("id %q has to have %s once", tunnel.Clip(id), placeholder)
	}
	_, err := (&UserCA{id: id}).peer("user")
	return err
}

// peer returns whom a principal names.
func (ca *UserCA) peer(principal string) (tunnel.Peer, error) {
	if !usableName(principal) {
		return tunnel.Peer{}, fmt.Errorf("the principal %q is empty, too long or has control characters", tunnel.Clip(principal))
	}
	p := tunnel.Peer{ID: strings.Replace(ca.id, placeholder, principal, 1), Method: Method}
	if !strings.HasPrefix(ca.id, "spiffe://") {
		if strings.HasPrefix(p.ID, "spiffe://") || strings.HasPrefix(p.ID, tunnel.UserID) {
			return tunnel.Peer{}, fmt.Errorf("the principal %q reads like an id of another kind", tunnel.Clip(principal))
		}
		p.Auth = new(tunnel.AuthInfo)
		return p, nil
	}
	if strings.Contains(principal, "/") {
		return tunnel.Peer{}, fmt.Errorf("the principal %q has a slash", tunnel.Clip(principal))
	}
	var err error
	if p.Auth, err = identity.Principal(p.ID); err != nil {
		return tunnel.Peer{}, err
	}
	return p, nil
}

// Method is that of the Peers of this package.
const Method = "ssh"

// An Authority says which keys and certificates are accepted. It is not changed once it is
// in use.
type Authority struct {
	Keys AuthorizedKeys
	CAs  []*UserCA
}

// A Grant is what a key or certificate gives its client.
type Grant struct {
	Peer   tunnel.Peer
	Limits Limits

	user string
	key  ssh.PublicKey
	from netip.Addr
}

// Check returns what key gives a client that calls itself user and has the address from. It
// looks at the key alone, so that it takes the same time for any name. A certificate names
// the user by one of its principals. The error is for the log.
func (a *Authority) Check(user string, key ssh.PublicKey, from netip.Addr, now time.Time) (*Grant, error) {
	g := &Grant{user: user, key: key, from: from}
	var expires time.Time
	if cert, ok := key.(*ssh.Certificate); ok {
		ca, err := a.checkCert(cert, user, from, now)
		if err != nil {
			return nil, fmt.Errorf("certificate %q: %w", tunnel.Clip(cert.KeyId), err)
		}
		if g.Peer, err = ca.peer(user); err != nil {
			return nil, err
		}
		if cert.ValidBefore < 1<<62 {
			expires = time.Unix(int64(cert.ValidBefore), 0)
		}
	} else {
		k := a.Keys[string(key.Marshal())]
		switch {
		case k == nil:
			return nil, fmt.Errorf("no key in authorized_keys is %s", ssh.FingerprintSHA256(key))
		case !k.Expires.IsZero() && !now.Before(k.Expires):
			return nil, fmt.Errorf("the key %q has expired at %s", k.Name, k.Expires.UTC().Format(time.RFC3339))
		case !k.Limits.From.admits(from):
			return nil, fmt.Errorf("the key %q is not for clients at %s", k.Name, from)
		}
		info := k.Info
		g.Peer, g.Limits, expires = tunnel.Peer{ID: k.Name, Method: Method, Auth: &info}, k.Limits, k.Expires
	}
	g.Peer.Auth.Expires = expires
	return g, nil
}

// Recheck is Check for a client that had g from another Authority, or earlier.
func (a *Authority) Recheck(g *Grant, now time.Time) (*Grant, error) {
	return a.Check(g.user, g.key, g.from, now)
}

// checkCert verifies a user's certificate: PROTOCOL.certkeys of OpenSSH.
func (a *Authority) checkCert(cert *ssh.Certificate, user string, from netip.Addr, now time.Time) (*UserCA, error) {
	ca := a.caOf(cert.SignatureKey)
	switch {
	case ca == nil:
		return nil, fmt.Errorf("its CA %s is not listed", ssh.FingerprintSHA256(cert.SignatureKey))
	case cert.CertType != ssh.UserCert:
		return nil, errors.New("it is not a user's")
	case len(cert.ValidPrincipals) == 0: // which would be valid for everybody
		return nil, errors.New("it names no principal")
	}
	if _, ok := cert.Extensions["permit-port-forwarding"]; !ok {
		return nil, errors.New("it lacks the extension permit-port-forwarding, and there is nothing else here")
	}
	if err := checkKey(cert.Key); err != nil {
		return nil, err
	}
	var sources *From
	for name, value := range cert.CriticalOptions {
		switch name {
		case "source-address":
			var err error
			if sources, err = parseSourceAddress(value); err != nil {
				return nil, err
			}
		case "force-command":
			return nil, errors.New("it forces a command, and nothing runs commands here")
		default:
			return nil, fmt.Errorf("its critical option %q is not supported", tunnel.Clip(name))
		}
	}
	if !sources.admits(from) {
		return nil, fmt.Errorf("it is not for clients at %s", from)
	}
	checker := &ssh.CertChecker{
		SupportedCriticalOptions: []string{"source-address"},
		Clock:                    func() time.Time { return now },
	}
	if err := checker.CheckCert(user, cert); err != nil {
		return nil, err
	}
	return ca, nil
}

// parseSourceAddress reads a list of addresses and ranges, which has neither wildcards
// nor negations.
func parseSourceAddress(s string) (*From, error) {
	if strings.ContainsAny(s, "*?!") || s == "" {
		return nil, errors.New("its source-address is malformed")
	}
	return parseFrom(s)
}

func (a *Authority) caOf(key ssh.PublicKey) *UserCA {
	wire := key.Marshal()
	for _, ca := range a.CAs {
		for _, k := range ca.keys {
			if bytes.Equal(k, wire) {
				return ca
			}
		}
	}
	return nil
}

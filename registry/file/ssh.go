package file

import (
	"path/filepath"
	"slices"

	"go.yaml.in/yaml/v3"

	"culvert.dev/identity/sshkeys"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// An SSH says who is let in by SSH at a listener, and with which host key it is served.
type SSH struct {
	HostKeyFile        string        `yaml:"hostKeyFile,required"`
	AuthorizedKeysFile string        `yaml:"authorizedKeysFile"`
	UserCAs            []SSHUserCA   `yaml:"userCAs" what:"a CA" empty:"leave the key out where no CA names users"`
	Names              []tunnel.Name `yaml:"names" what:"a name" as:"gatewayName" unique:"name" empty:"leave the key out, and DNS publishes no host key"`

	HostKey, AuthorizedKeys registry.Secret // what the files have
	fingerprints            []registry.SSHFingerprint
}

// An SSHUserCA is a CA of users' certificates.
type SSHUserCA struct {
	File string `yaml:"file,required"`
	ID   string `yaml:"id,required"` // with "{principal}" in it

	Keys string // what File has
}

func (s *SSH) check(d *decoder, at mapping) {
	if s.AuthorizedKeysFile == "" && at.value("userCAs") == nil {
		d.errorf(at.node, "name authorizedKeysFile or userCAs", "ssh accepts no key, which would refuse every client")
	}
}

func (c *SSHUserCA) check(d *decoder, at mapping) {
	if n := at.value("id"); n != nil && c.ID != "" {
		if err := sshkeys.CheckID(c.ID); err != nil {
			d.errorf(n, "write it like spiffe://corp.example/ssh/{principal}", "%v", err)
		}
	}
}

// parseGatewayName parses a name by which clients connect to the gateway.
func parseGatewayName(_, s string) (tunnel.Name, *complaint) {
	name, c := parseName(s)
	if c != nil {
		return tunnel.Name{}, complain(c.hint, "name %q: %s", clip(s), c.msg)
	}
	return name, nil
}

// checkSSH finds settings of SSH that do not go with the protocols of a listener.
func (d *decoder) checkSSH(l *Listener, at mapping) {
	spoken := slices.Contains(l.Protocols, "ssh")
	switch {
	case spoken && at.value("ssh") == nil:
		d.errorf(at.value("protocols"), "add ssh: {hostKeyFile: FILE, authorizedKeysFile: FILE}", "ssh needs a host key, and the keys or CAs of its clients")
	case !spoken && at.value("ssh") != nil && !l.UDP():
		d.errorf(at.value("ssh"), "add it to protocols: [sni, ssh]", "ssh has no effect: it is not among the listener's protocols")
	}
}

// forTable returns s as the table has it.
func (s *SSH) forTable() *registry.SSHSettings {
	if s == nil {
		return nil
	}
	out := &registry.SSHSettings{HostKey: s.HostKey, AuthorizedKeys: s.AuthorizedKeys, Names: s.Names, Fingerprints: s.fingerprints}
	for _, ca := range s.UserCAs {
		out.UserCAs = append(out.UserCAs, registry.SSHUserCA{Keys: ca.Keys, ID: ca.ID})
	}
	return out
}

// readSSHFiles reads the files of listeners with SSH, and returns what they have.
func (d *decoder) readSSHFiles(path string) (all [][]byte) {
	for i := range d.cfg.Listeners {
		s, at := d.cfg.Listeners[i].SSH, d.listener(i).object("ssh")
		if s == nil {
			continue
		}
		get := func(n *yaml.Node, name, hint string) (string, bool) {
			if n == nil || name == "" {
				return "", false
			}
			if !filepath.IsAbs(name) {
				name = filepath.Join(filepath.Dir(path), name)
			}
			content, err := read(name, maxAuthSize)
			if err != nil {
				d.errorf(n, hint, "%v", err)
				return "", false
			}
			d.cfg.files = append(d.cfg.files, name)
			all = append(all, content)
			if why := writable(name); why != "" {
				d.errorf(n, "chmod go-w it", "%q %s", name, why)
				return "", false
			}
			return string(content), true
		}
		n := at.value("hostKeyFile")
		if text, ok := get(n, s.HostKeyFile, "make one with: ssh-keygen -t ed25519 -N '' -f "+clip(s.HostKeyFile)); ok {
			s.HostKey = registry.Secret(text)
			if key, err := sshkeys.ParseHostKey([]byte(text)); err != nil {
				d.errorf(n, "make one with: ssh-keygen -t ed25519 -N '' -f FILE", "%v", err)
			} else {
				for _, f := range sshkeys.Fingerprints(key.PublicKey()) {
					s.fingerprints = append(s.fingerprints, registry.SSHFingerprint(f))
				}
			}
			d.warnFile(n, d.cfg.files[len(d.cfg.files)-1])
		}
		n = at.value("authorizedKeysFile")
		if text, ok := get(n, s.AuthorizedKeysFile, "paths are relative to the configuration file"); ok {
			s.AuthorizedKeys = registry.Secret(text)
			keys, mistakes := sshkeys.ParseAuthorizedKeys(text)
			for _, m := range mistakes[:min(len(mistakes), maxErrors)] {
				d.errs = append(d.errs, &Error{File: d.cfg.files[len(d.cfg.files)-1], Line: m.Line, Column: 1, Msg: m.Text, Hint: "write [OPTIONS] KEY NAME; see AUTHORIZED_KEYS FILE FORMAT in sshd(8)"})
			}
			if len(keys)+len(mistakes)+len(s.UserCAs) == 0 {
				d.warnf(n, "add one: its line is what ssh-keygen writes to a .pub file", "%q has no key, so every client is refused", s.AuthorizedKeysFile)
			}
		}
		for j := range s.UserCAs {
			ca, n := &s.UserCAs[j], mapping{at.item("userCAs", j)}.value("file")
			if text, ok := get(n, ca.File, "paths are relative to the configuration file"); ok && sshkeys.CheckID(ca.ID) == nil {
				ca.Keys = text
				if _, err := sshkeys.ParseUserCA(text, ca.ID); err != nil {
					d.errorf(n, "it has the public keys of a CA, one on each line", "%v", err)
				}
			}
		}
	}
	return all
}

package inbound

import (
	"errors"
	"fmt"

	"culvert.dev/connect/ssh"
	"culvert.dev/identity/sshkeys"
	"culvert.dev/registry"
)

// useSSH has p serve by s from the next connection on.
func useSSH(p *ssh.Protocol, s *registry.SSHSettings) error {
	if s == nil {
		return errors.New("ssh: the listener has no settings for it")
	}
	c, err := sshConfig(s)
	if err != nil {
		return fmt.Errorf("ssh: %w", err)
	}
	return p.Use(c)
}

func sshConfig(s *registry.SSHSettings) (*ssh.Config, error) {
	key, err := sshkeys.ParseHostKey([]byte(s.HostKey))
	if err != nil {
		return nil, err
	}
	a := &sshkeys.Authority{}
	var mistakes []sshkeys.Mistake
	if a.Keys, mistakes = sshkeys.ParseAuthorizedKeys(string(s.AuthorizedKeys)); len(mistakes) > 0 {
		return nil, fmt.Errorf("authorized keys, line %d: %s", mistakes[0].Line, mistakes[0].Text)
	}
	for _, ca := range s.UserCAs {
		one, err := sshkeys.ParseUserCA(ca.Keys, ca.ID)
		if err != nil {
			return nil, err
		}
		a.CAs = append(a.CAs, one)
	}
	return ssh.NewConfig(a, key), nil
}

// changeSSH has the SSH of next, which is that of before, serve by the settings of now. Where
// it can't, it serves what it served.
func (o *Listener) changeSSH(next *config, before *registry.SSHSettings, now *registry.ListenerSettings) {
	for _, p := range next.serving.Protocols {
		p, ok := p.(*ssh.Protocol)
		if !ok {
			continue
		}
		if err := useSSH(p, now.SSH); err != nil {
			o.builder.Log.Warn("keeping the current SSH keys", "listener", next.Name, "err", err)
			return
		}
		o.builder.Log.Info("SSH keys changed", "listener", next.Name)
		if now.EndWithCredential && o.builder.CredentialGone != nil {
			for _, id := range goneIDs(before, now.SSH) {
				o.builder.CredentialGone(Credential{next.Name, sshkeys.Method, id})
			}
		}
	}
}

// goneIDs returns the IDs of keys that are accepted no more, or that were replaced.
func goneIDs(before, now *registry.SSHSettings) (ids []string) {
	was, _ := sshkeys.ParseAuthorizedKeys(string(before.AuthorizedKeys))
	is, _ := sshkeys.ParseAuthorizedKeys(string(now.AuthorizedKeys))
	for wire, k := range was {
		if other := is[wire]; other == nil || other.Name != k.Name {
			ids = append(ids, k.Name)
		}
	}
	return ids
}

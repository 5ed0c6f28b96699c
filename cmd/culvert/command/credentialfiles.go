package command

import (
	"bytes"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"culvert.dev/identity/enroll"
)

// credentialFiles are the files of what a command shows to a server, and of the CAs that it
// accepts the server by.
type credentialFiles struct{ cert, key, ca, token string }

// add adds the flags. The servers are called that in the help, and defaultCA is what is accepted
// without --ca.
func (c *credentialFiles) add(cmd *cobra.Command, servers, defaultCA string) {
	f := cmd.Flags()
	f.StringVar(&c.cert, "cert", "", "file with the certificate chain to show to "+servers+", PEM")
	f.StringVar(&c.key, "key", "", "file with its private key, PEM (default: that of --cert)")
	f.StringVar(&c.ca, "ca", "", "file with CA certificates for "+servers+", PEM (default: "+defaultCA+")")
	f.StringVar(&c.token, "token-file", "", "file with a bearer token for "+servers)
	for _, name := range []string{"cert", "key", "ca"} {
		_ = cmd.MarkFlagFilename(name, "pem", "crt", "key")
	}
	_ = cmd.MarkFlagFilename("token-file")
}

// check finds mistakes in the flags, and puts the defaults and absolute paths in.
func (c *credentialFiles) check() error {
	switch {
	case c.cert == "" && c.key != "":
		return usageError("give --cert, too", "--key needs --cert")
	case c.key == "":
		c.key = c.cert
	}
	for _, path := range []*string{&c.cert, &c.key, &c.ca, &c.token} {
		if *path == "" {
			continue
		}
		full, err := filepath.Abs(*path)
		if err != nil {
			return err
		}
		*path = full
	}
	return nil
}

// readable finds files that cannot be read, after check. The parser of configuration files would
// report them by its own keys.
func (c *credentialFiles) readable() error {
	for _, f := range []struct{ flag, path string }{{"cert", c.cert}, {"key", c.key}, {"ca", c.ca}, {"token-file", c.token}} {
		if f.path == "" {
			continue
		}
		var text []byte
		info, err := os.Stat(f.path)
		regular := err == nil && info.Mode().IsRegular() // a pipe can be read once
		if regular {
			text, err = os.ReadFile(f.path)
		}
		switch {
		case err != nil:
			return usageError("name a file that this user can read", "--%s: %w", f.flag, noSuchFile(err))
		case f.flag == "cert" && c.key == c.cert && regular && !bytes.Contains(text, []byte("PRIVATE KEY-----")):
			return usageError("name the file with its private key by --key", "--cert: %s has no private key", f.path)
		}
	}
	return nil
}

// gatewayAccess is what a command shows to gateways and accepts them by: files, or what a device
// has from "culvert join".
type gatewayAccess struct {
	credentialFiles
	serverName string
	peers      []string // SPIFFE IDs of gateways
	state      string   // the folder where this device has joined

	joined *enroll.Membership // in state; nil where the flags say who this is
}

// gatewayAccessFlags are the flags that add makes, but that for SPIFFE IDs.
var gatewayAccessFlags = []string{"cert", "key", "ca", "token-file", "server-name", "state"}

// add adds the flags. Gateways are given by the flag via, and their SPIFFE IDs by the flag peer.
func (a *gatewayAccess) add(cmd *cobra.Command, via, peer string) {
	a.credentialFiles.add(cmd, "the gateways", "the system's")
	f := cmd.Flags()
	f.StringVar(&a.serverName, "server-name", "", "name in the gateways' certificates (default: the host of --"+via+")")
	f.StringArrayVar(&a.peers, peer, nil, "SPIFFE `ID` that a gateway may have in place of the name in its certificate; repeatable")
	f.StringVar(&a.state, "state", "", "`FOLDER` in which this device has joined (default: "+stateFolderHelp+")")
	_ = cmd.MarkFlagDirname("state")
	for _, name := range []string{"server-name", peer} {
		_ = cmd.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}
}

// useJoined has the identity be that of a device that has joined, where no flag says anything else.
func (a *gatewayAccess) useJoined() (err error) {
	if a.credentialFiles != (credentialFiles{}) || a.serverName != "" || len(a.peers) > 0 {
		if a.state != "" {
			return usageError("leave out one of them", "--state has an identity, and so have --cert, --key, --ca, --token-file, --server-name, --peer and --gateway-id")
		}
		return nil
	}
	m, at, err := joinedAt(a.state)
	if err == nil && m != nil {
		a.joined, a.state = m, at
	}
	return err
}

// check finds mistakes in the flags after useJoined, and puts the defaults in.
func (a *gatewayAccess) check() error {
	if a.joined == nil && a.cert == "" && a.key == "" && a.token == "" {
		return usageError("give --cert and --key, or --token-file, or run culvert join with a token first", "gateways refuse callers without credentials")
	}
	if err := a.credentialFiles.check(); err != nil {
		return err
	}
	return a.readable()
}

package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/identity/enroll"
	"culvert.dev/registry/file"
)

// enrollmentOf is what c says of the authority for devices; nil for nothing.
func enrollmentOf(c *file.Config) *enroll.Settings {
	e := c.Enrollment
	if e == nil {
		return nil
	}
	return &enroll.Settings{Gateway: e.Gateway, Transport: e.Transport, Key: e.Key, Trust: e.TrustDomain, CA: e.CA, Lifetime: e.MaxTTL, State: e.State}
}

// stateFolderHelp is what help calls the folder of stateFolder.
const stateFolderHelp = "/var/lib/culvert for root, else $XDG_STATE_HOME/culvert or ~/.local/state/culvert"

// stateFolder is where this user keeps the identity of a device; "" where that is not known.
func stateFolder() string {
	if os.Geteuid() == 0 {
		return "/var/lib/culvert"
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "culvert")
	}
	if runtime.GOOS == "windows" {
		if dir := os.Getenv("LOCALAPPDATA"); filepath.IsAbs(dir) {
			return filepath.Join(dir, "culvert")
		}
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return ""
	}
	return filepath.Join(home, ".local", "state", "culvert")
}

// joinedAt returns where the device of a folder has joined, that of stateFolder for ""; nil if
// it has not.
func joinedAt(folder string) (m *enroll.Membership, at string, err error) {
	if at = folder; at == "" {
		at = stateFolder()
	}
	if at == "" || folder == "" && !enroll.Joined(at) {
		return nil, at, nil
	}
	if at, err = filepath.Abs(at); err != nil {
		return nil, at, err
	}
	m, err = enroll.Load(at)
	if errors.Is(err, os.ErrNotExist) {
		return nil, at, usageError("run culvert join first, with the same --state", "no device has joined in %s", at)
	}
	return m, at, err
}

// joinedKey is the name of the key of a device that has joined.
const joinedKey = "device"

// joinedIdentity is what a configuration has of a device that has joined in a folder: its key,
// its trust, and that it is renewed.
func joinedIdentity(m *enroll.Membership, folder string) map[string]any {
	own := filepath.Join(folder, enroll.IdentityFile)
	return map[string]any{
		"joined": folder,
		"keys":   map[string]any{joinedKey: map[string]any{"certificateFile": own, "keyFile": own}},
		"trust":  map[string]any{m.TrustDomain: map[string]any{"caFile": filepath.Join(folder, enroll.BundleFile)}},
	}
}

func isTerminalInput(r io.Reader) bool {
	f, ok := r.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0 && f.Name() != os.DevNull
}

// joinDevice gives this device an identity by a token.
func joinDevice(ctx context.Context, w io.Writer, token string, o *joinOptions) error {
	if len(o.zones) > 0 {
		return usageError("leave it out", "--zones is for a site, and the token is for a device")
	}
	if err := enroll.CheckToken(token); err != nil {
		return badToken(err)
	}
	folder := o.state
	if folder == "" {
		folder = stateFolder()
	}
	folder, err := filepath.Abs(folder)
	if err != nil {
		return err
	}
	name := o.name
	if name == "" {
		if host, err := os.Hostname(); err == nil {
			name, _, _ = strings.Cut(strings.ToLower(host), ".")
		}
	}
	dialer, done, err := o.proxy.dialer()
	if err != nil {
		return err
	}
	defer done()
	m, err := enroll.Join(ctx, dialer, token, name, folder, o.replace)
	switch {
	case errors.Is(err, enroll.ErrJoined):
		return &cliError{err: fmt.Errorf("%w: it is %s, in %s", err, m.ID, folder), hint: "add --replace to have another identity, or --state FOLDER to have one more", code: exitFailed}
	case err != nil:
		return err
	}
	fmt.Fprintf(w, "joined as %s\n", printable(m.ID))
	fmt.Fprintf(w, "the key and the certificate are in %s\n", printable(filepath.Join(folder, enroll.IdentityFile)))
	if off := m.ClockOff; off > enroll.Skew || off < -enroll.Skew {
		word := "behind"
		if off < 0 {
			word, off = "ahead of", -off
		}
		fmt.Fprintf(w, "%s the clock of this machine is %s %s that of the gateway: set it, or no certificate can be verified here\n", doubtful("warning:"), humanSeconds(off.Seconds()), word)
	}
	_, err = fmt.Fprintf(w, "next: culvert expose NAME --to HOST:PORT%s\n", stateFlag(o.state))
	return err
}

// stateFlag is the flag by which other commands find a folder.
func stateFlag(folder string) string {
	if folder == "" {
		return ""
	}
	return " --state " + folder
}

type devicesOptions struct {
	admin  adminOptions
	watch  watchFlag
	output string
}

func newDevices() *cobra.Command {
	var o devicesOptions
	cmd := &cobra.Command{
		Use:   "devices",
		Short: "Show the devices that have their identity from a running gateway",
		Long: `Devices lists the devices that have joined by a token of culvert invite --device:
their SPIFFE IDs, when they have joined, when they have renewed their certificate
last, and until when it is valid. A device renews at half of the life of its
certificate: one that has expired was away for too long, and joins again.`,
		Example: `  culvert devices --admin unix:/run/culvert/admin.sock
  culvert devices -o json | jq -r '.[] | select(.expired).name'
  culvert devices remove cam-7`,
		Args:              args(0, "no arguments"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.watch.run(cmd.Context(), cmd.OutOrStdout(), o.output, func(ctx context.Context, w io.Writer) error {
				return runDevices(ctx, w, &o)
			})
		},
	}
	o.admin.add(cmd)
	o.watch.add(cmd)
	addOutput(cmd, &o.output)
	cmd.AddCommand(newDevicesRemove(&o.admin))
	return cmd
}

func (o *adminOptions) devices(ctx context.Context) ([]enroll.Device, error) {
	c, err := o.client()
	if err != nil {
		return nil, err
	}
	all := []enroll.Device{}
	if err := c.ask(ctx, http.MethodGet, "/devices", nil, &all); err != nil {
		return nil, err
	}
	return all, nil
}

func runDevices(ctx context.Context, w io.Writer, o *devicesOptions) error {
	all, err := o.admin.devices(ctx)
	if err != nil {
		return err
	}
	if o.output == "json" {
		return writeJSON(w, all)
	}
	if len(all) == 0 {
		_, err := fmt.Fprintln(w, "no device has joined")
		return err
	}
	ago := func(t time.Time) string {
		if t.IsZero() {
			return "-"
		}
		return humanSeconds(time.Since(t).Seconds()) + " ago"
	}
	rows := [][]string{{"DEVICE", "ID", "JOINED", "RENEWED", "CERTIFICATE"}}
	for i := range all {
		d := &all[i]
		until := good("valid") + " for " + humanSeconds(time.Until(d.Expires).Seconds())
		if d.Expired {
			until = bad("expired") + " " + ago(d.Expires)
		}
		rows = append(rows, []string{printable(d.Name), printable(d.ID), ago(d.Joined), ago(d.Renewed), until})
	}
	return writeTable(w, rows)
}

func newDevicesRemove(o *adminOptions) *cobra.Command {
	return &cobra.Command{
		Use:   "remove NAME",
		Short: "Revoke the identity of a device, and end its tunnels",
		Long: `Remove has a running gateway revoke the certificates of a device. It is refused
from then on, its tunnels and the names that it exposes end with the reason
revoked, and it gets no other certificate. To let it in again, invite it again.

Other gateways follow devices.crl in the state folder of enrollment as a crlFile,
or accept the last certificate until it expires.`,
		Example: `  culvert devices remove cam-7 --admin unix:/run/culvert/admin.sock`,
		Args:    args(1, "one NAME"),
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			all, _ := o.devices(cmd.Context())
			names := make([]string, 0, len(all))
			for i := range all {
				names = append(names, all[i].Name)
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, a []string) error {
			answer, err := o.sites(cmd.Context(), "remove-device", url.Values{"name": {a[0]}})
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "removed %s\n", printable(answer["device"]))
			return err
		},
	}
}

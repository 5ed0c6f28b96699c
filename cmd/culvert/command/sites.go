package command

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/internal/invitation"
	"culvert.dev/registry/peer/join"
)

type inviteOptions struct {
	admin  adminOptions
	zones  []string
	device string
	id     string
	uses   int
	ttl    time.Duration
}

func newInvite() *cobra.Command {
	var o inviteOptions
	cmd := &cobra.Command{
		Use:   "invite",
		Short: "Make a token by which another site, or a device, joins",
		Long: `Invite has a running gateway make a token, and prints it. Give it to the
administrator of the other site, or take it to the device: culvert join uses it.
It works until its time is over; the gateway keeps no more than a hash of it.

Without --device it makes another site a peer of this one. That site may offer
services with names of --zones, and no others. It sees of this one what policies
with the verb catalog allow.

With --device it gives a device an identity: a certificate of this gateway's trust
domain with the SPIFFE ID of --id, which the device renews by itself. The gateway
needs enrollment in its configuration. A NAME that ends with * is for several
devices: each says how it is called, and the * at the end of --id becomes that.`,
		Example: `  culvert invite --zones '*.west.example' --ttl 1h --admin unix:/run/culvert/admin.sock
  culvert invite --device cam-7
  culvert invite --device cam-7 --id spiffe://corp.example/ns/edge/sa/cam-7 --ttl 15m
  culvert invite --device 'cam-*' --uses 20 --ttl 24h`,
		Args:              args(0, "no arguments"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runInvite(cmd, &o)
		},
	}
	o.admin.add(cmd)
	f := cmd.Flags()
	f.StringSliceVar(&o.zones, "zones", nil, "names that the other site may offer: `*.west.example`; none if left out")
	f.StringVar(&o.device, "device", "", "invite a device with this `NAME`, or several with names that begin so: cam-*")
	f.StringVar(&o.id, "id", "", "SPIFFE `ID` of the device; a * at the end becomes its name (default: spiffe://DOMAIN/device/NAME)")
	f.IntVar(&o.uses, "uses", 1, "how many devices the token is for")
	f.DurationVar(&o.ttl, "ttl", time.Hour, "how long the token is valid; 720h at most")
	cmd.MarkFlagsMutuallyExclusive("zones", "device")
	for _, name := range []string{"zones", "device", "id", "uses", "ttl"} {
		_ = cmd.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}
	return cmd
}

func runInvite(cmd *cobra.Command, o *inviteOptions) error {
	what, q := "invite", url.Values{"zone": o.zones, "ttl": {o.ttl.String()}}
	switch {
	case o.device != "":
		what, q = "invite-device", url.Values{"name": {o.device}, "id": {o.id}, "uses": {strconv.Itoa(o.uses)}, "ttl": {o.ttl.String()}}
	case o.id != "", cmd.Flags().Changed("uses"):
		return usageError("add --device NAME", "--id and --uses are for a device")
	}
	if _, err := join.ParseZones(o.zones); err != nil {
		return usageError("", "--zones: %w", err)
	}
	answer, err := o.admin.sites(cmd.Context(), what, q)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(cmd.OutOrStdout(), answer["token"])
	return err
}

type joinOptions struct {
	admin   adminOptions
	zones   []string
	name    string
	state   string
	replace bool
	proxy   proxyFlags
}

func newJoin() *cobra.Command {
	var o joinOptions
	cmd := &cobra.Command{
		Use:   "join -",
		Short: "Join another site as a peer, or give this device an identity, by a token on standard input",
		Long: `Join uses a token that culvert invite has made on another gateway. The token is
read from standard input, and never from an argument, which other users of this
machine could see. The other gateway is verified by the token before anything is
sent to it.

A token for a device gives this machine an identity: join makes a key, which never
leaves the machine, gets a certificate for it, and puts both into --state with the
CAs of the trust domain and the address of the gateway. Then culvert expose and
culvert agent need no further flags: they use what is there, and renew the
certificate at half of its life.

By a token for a site, a running gateway joins the other site as a peer. Each side
stores the other's name, trust bundle, zones and gateways. The other site may
offer services with names of --zones, and no others. It sees of this one what
policies with the verb catalog allow.`,
		Example: `  culvert join - < token
  ssh gw1.example culvert invite --device cam-7 | culvert join -
  culvert join --name cam-7 --state /var/lib/culvert - < token
  culvert join --upstream-proxy http://proxy.corp:3128 --upstream-proxy-user alice --upstream-proxy-password-file pw - < token
  culvert join --zones '*.east.example' --admin unix:/run/culvert/admin.sock - < token`,
		Args:              args(1, "- for standard input"),
		ValidArgsFunction: cobra.FixedCompletions([]string{"-"}, cobra.ShellCompDirectiveNoFileComp),
		RunE: func(cmd *cobra.Command, a []string) error {
			if a[0] != "-" {
				return usageError("write culvert join -, and give the token on standard input", "a token is never an argument: other users of this machine could see it")
			}
			return runJoin(cmd, &o)
		},
	}
	o.admin.add(cmd)
	f := cmd.Flags()
	f.StringSliceVar(&o.zones, "zones", nil, "of a site: names that the other site may offer: `*.east.example`; none if left out")
	f.StringVar(&o.name, "name", "", "of a device: its `NAME`, where the invitation is for several (default: the host name)")
	f.StringVar(&o.state, "state", "", "of a device: `FOLDER` for its identity (default: "+stateFolderHelp+")")
	f.BoolVar(&o.replace, "replace", false, "of a device: put the new identity in place of the one that is there")
	o.proxy.add(cmd)
	_ = cmd.MarkFlagDirname("state")
	for _, name := range []string{"zones", "name"} {
		_ = cmd.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}
	return cmd
}

func runJoin(cmd *cobra.Command, o *joinOptions) error {
	if _, err := join.ParseZones(o.zones); err != nil {
		return usageError("", "--zones: %w", err)
	}
	if isTerminalInput(cmd.InOrStdin()) {
		fmt.Fprintln(cmd.ErrOrStderr(), "paste the token, and end with ctrl-D:")
	}
	text, err := io.ReadAll(io.LimitReader(cmd.InOrStdin(), 64<<10))
	if err != nil {
		return err
	}
	token := strings.TrimSpace(string(text))
	if invitation.KindOf(token) == invitation.Device {
		return joinDevice(cmd.Context(), cmd.OutOrStdout(), token, o)
	}
	if err := join.CheckToken(token); err != nil {
		return badToken(err)
	}
	answer, err := o.admin.sites(cmd.Context(), "join", url.Values{"zone": o.zones, "token": {token}})
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(cmd.OutOrStdout(), "joined %s\n", printable(answer["peer"])); err != nil {
		return err
	}
	if len(o.zones) == 0 {
		_, err = fmt.Fprintf(cmd.ErrOrStderr(), "it may offer no names, because --zones was left out: to change that, remove the peer at both sites, and join again with --zones\n")
	}
	return err
}

// badToken says where another token comes from.
func badToken(err error) error {
	return &cliError{err: err, hint: "ask the other site for a token of \"culvert invite\", and copy all of it", code: exitFailed}
}

func newPeersRemove(o *adminOptions) *cobra.Command {
	return &cobra.Command{
		Use:   "remove NAME",
		Short: "Forget a site that has joined by a token: its trust and its names",
		Long: `Remove has a running gateway forget a site that has joined by a token. Its names
are no longer served, its gateways are no longer trusted, and their tunnels end
with the reason revoked. The other site is not told: remove this one there.`,
		Example: `  culvert peers remove west --admin unix:/run/culvert/admin.sock`,
		Args:    args(1, "one NAME"),
		RunE: func(cmd *cobra.Command, a []string) error {
			answer, err := o.sites(cmd.Context(), "remove", url.Values{"name": {a[0]}})
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "removed %s\n", printable(answer["peer"]))
			return err
		},
	}
}

// sites asks the gateway for something that concerns other sites.
func (o *adminOptions) sites(ctx context.Context, what string, q url.Values) (map[string]string, error) {
	c, err := o.client()
	if err != nil {
		return nil, err
	}
	body, err := c.post(ctx, "/sites/"+what, q)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	var answer map[string]string
	if err := json.NewDecoder(body).Decode(&answer); err != nil {
		return nil, fmt.Errorf("the gateway's answer: %w", err)
	}
	return answer, nil
}

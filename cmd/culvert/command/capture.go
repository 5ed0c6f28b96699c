package command

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"culvert.dev/internal/capture"
)

// captureName is the flag that tells captures apart.
type captureName string

func (n *captureName) add(cmd *cobra.Command, what string) {
	cmd.Flags().StringVar((*string)(n), "name", "", what)
	_ = cmd.RegisterFlagCompletionFunc("name", cobra.NoFileCompletions)
}

type captureUpOptions struct {
	name       captureName
	port       uint16
	vips       string
	cidrs      []string
	all        bool
	uids       []uint
	cgroups    []string
	except     []string
	exceptUIDs []uint
	mark       string
	interfaces []string
}

func newCapture() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "capture",
		Short: "Redirect connections of programs to an agent, by nftables rules",
		Long: `Capture redirects TCP connections of unmodified programs to a listener of the
agent, by a table of nftables. The table stays until "culvert capture down": an
agent without privileges can serve what is captured, at a listener with the
protocol captured. In a pod an init container runs "capture up",
and the agent is a sidecar.

It needs Linux and CAP_NET_ADMIN, and is about the network namespace that it runs
in. Connections that stand are left alone, and so are connections to addresses of
this host. Only TCP is captured, and neither raw sockets nor, with --uid, what a
program does after it has become another user.`,
		Example: `  culvert capture up --port 15001 --cidr 240.0.0.0/4 --exclude-uid 1337
  culvert capture show
  culvert capture down`,
		Args: subcommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newCaptureUp(), newCaptureDown(), newCaptureShow())
	return cmd
}

func newCaptureUp() *cobra.Command {
	var o captureUpOptions
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Redirect connections until capture down",
		Long: `Up captures TCP connections whose destination and program are those of the flags,
in place of what the same --name has captured before. It may be run again: the
same flags come to the same rules.

Captured connections come to --port at 127.0.0.1 and [::1], where a listener with
the protocol captured serves them. Where nothing listens they are refused; they
never go past it. List addresses of IPv6, too, where the programs know some: what
is not listed is not captured.

The agent's own connections must not be captured, or each would come to the agent
again. A process may mark its sockets with CAP_NET_ADMIN alone; an agent without
it runs as a user of its own, and --exclude-uid leaves out all that this user
does. With --uid or --cgroup, the agent must not be among those.

With --interface, connections to the same addresses that come by it and that this
host routes for others, such as containers and virtual machines within a pod, are
captured, too. They come to --port at the address that this host has at the
interface, where the agent must listen. Name no interface by which strangers
come: they would use the agent's identity.`,
		Example: `  culvert capture up --port 15001 --cidr 240.0.0.0/4 --cidr fd00:76::/64 --exclude-uid 1337
  culvert capture up --name work --port 15001 --vips vips.txt --uid 1000 --exclude-mark 0x63760001
  culvert capture up --port 15001 --all --except 10.0.0.0/8 --exclude-uid 1337`,
		Args: args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runCaptureUp(cmd.OutOrStdout(), cmd.InOrStdin(), &o)
		},
	}
	f := cmd.Flags()
	o.name.add(cmd, "`NAME` that tells this capture from others in the network namespace; the table is culvert-NAME")
	f.Uint16Var(&o.port, "port", 0, "`PORT` of the agent's listener with the protocol captured")
	f.StringVar(&o.vips, "vips", "", "`FILE` with addresses and ranges to capture, one a line; - for standard input")
	f.StringArrayVar(&o.cidrs, "cidr", nil, "address or `RANGE` to capture; repeatable")
	f.BoolVar(&o.all, "all", false, "capture every destination; also without --vips and --cidr where --uid or --cgroup is given")
	f.UintSliceVar(&o.uids, "uid", nil, "capture programs of the user with this `NUMBER` alone; repeatable")
	f.StringArrayVar(&o.cgroups, "cgroup", nil, "capture programs in the cgroup of version 2 at this `PATH` below /sys/fs/cgroup alone; repeatable. One that is removed and created again needs up again")
	f.StringArrayVar(&o.except, "except", nil, "address or `RANGE` to leave alone; repeatable")
	f.UintSliceVar(&o.exceptUIDs, "exclude-uid", nil, "leave programs of the user with this `NUMBER` alone, such as the agent; repeatable")
	f.StringVar(&o.mark, "exclude-mark", "", "leave sockets with this `MARK` alone, such as 0x63760001")
	f.StringArrayVar(&o.interfaces, "interface", nil, "capture what comes by this interface for others, too; `NAME`, repeatable")
	_ = cmd.MarkFlagRequired("port")
	_ = cmd.MarkFlagFilename("vips")
	for _, name := range []string{"port", "cidr", "uid", "except", "exclude-uid", "exclude-mark", "interface"} {
		_ = cmd.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}
	return cmd
}

func newCaptureDown() *cobra.Command {
	var name captureName
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Remove the rules of capture up",
		Long: `Down removes the rules of "capture up" with the same --name, and what an agent has
left that was killed. It is no error where there are none. Rules that belong to a
running agent stay, and that is an error: they go with the agent.

Connections that were captured stand.`,
		Example: `  culvert capture down
  culvert capture down --name work`,
		Args: args(0, "no arguments"),
		RunE: func(*cobra.Command, []string) error {
			return captureError(capture.Remove(capture.Rules{Name: string(name)}))
		},
	}
	name.add(cmd, "`NAME` of the capture")
	return cmd
}

func newCaptureShow() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "show",
		Short: "Show what is captured in this network namespace",
		Long: `Show prints each capture in this network namespace, as the kernel has it: what is
captured, where it goes, what is left alone, and whether the table stays or belongs
to a process.`,
		Example: `  culvert capture show
  culvert capture show -o json | jq '.[].cidrs'`,
		Args: args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			all, err := capture.Show()
			if err != nil {
				return captureError(err)
			}
			if output == "json" {
				return writeJSON(cmd.OutOrStdout(), all)
			}
			return printCaptures(cmd.OutOrStdout(), all)
		},
	}
	addOutput(cmd, &output)
	return cmd
}

// captureError adds what to do to an error.
func captureError(err error) error {
	switch {
	case errors.Is(err, capture.ErrNotPermitted):
		return &cliError{err: err, hint: "in a pod, run it in an init container with runAsUser: 0 and capabilities: {add: [NET_ADMIN]}", code: exitFailed}
	case errors.Is(err, capture.ErrOwned):
		return &cliError{err: err, hint: `"culvert capture show" says which process; another --name has a table of its own`, code: exitFailed}
	}
	return err
}

func runCaptureUp(w io.Writer, stdin io.Reader, o *captureUpOptions) error {
	r, err := o.rules(stdin)
	if err != nil {
		return err
	}
	c, err := capture.Install(*r)
	if err != nil {
		return captureError(err)
	}
	if err := c.Close(); err != nil { // the table stays
		return err
	}
	all, err := capture.Show()
	if err != nil {
		return captureError(err)
	}
	return printCaptures(w, slices.DeleteFunc(all, func(s capture.Status) bool { return s.Name != r.Name }))
}

// rules returns what the flags say.
func (o *captureUpOptions) rules(stdin io.Reader) (*capture.Rules, error) {
	r := &capture.Rules{Name: string(o.name), Port: o.port, All: o.all, Cgroups: o.cgroups, Interfaces: o.interfaces, Stay: true}
	if err := capture.CheckName(r.Name); err != nil {
		return nil, usage(err)
	}
	if o.port == 0 {
		return nil, usageError("name the port of the agent's listener", "--port 0 is no port")
	}
	for _, list := range []struct {
		flag string
		from []string
		to   *[]netip.Prefix
	}{{"cidr", o.cidrs, &r.CIDRs}, {"except", o.except, &r.Except}} {
		for _, s := range list.from {
			p, err := parseRange(s)
			if err != nil {
				return nil, usageError("write an address, or a range such as 240.0.0.0/4", "--%s %q: %w", list.flag, s, err)
			}
			*list.to = append(*list.to, p)
		}
	}
	if o.vips != "" {
		listed, err := readRanges(o.vips, stdin)
		if err != nil {
			return nil, err
		}
		r.CIDRs = append(r.CIDRs, listed...)
	}
	for _, list := range []struct {
		flag string
		from []uint
		to   *[]uint32
	}{{"uid", o.uids, &r.UIDs}, {"exclude-uid", o.exceptUIDs, &r.ExceptUIDs}} {
		for _, uid := range list.from {
			if uint64(uid) >= 1<<32-1 {
				return nil, usageError("write the number of a user, as id -u prints it", "--%s %d is no user", list.flag, uid)
			}
			*list.to = append(*list.to, uint32(uid))
		}
	}
	if o.mark != "" {
		mark, err := strconv.ParseUint(o.mark, 0, 32)
		if err != nil || mark == 0 {
			return nil, usageError("write a number such as 0x63760001", "--exclude-mark %q is no mark", o.mark)
		}
		r.Mark = uint32(mark)
	}
	for _, name := range r.Interfaces {
		if name == "" || len(name) > 15 || strings.ContainsAny(name, "/ ") {
			return nil, usageError("write the name of an interface, as ip link prints it", "--interface %q is no name of an interface", name)
		}
	}
	programs := len(r.UIDs) + len(r.Cgroups)
	switch {
	case len(r.CIDRs) == 0 && programs == 0 && !r.All:
		return nil, usageError("add --cidr, --vips, --uid, --cgroup or --all", "no destination and no program to capture is named")
	case programs == 0 && len(r.ExceptUIDs) == 0 && r.Mark == 0:
		return nil, usageError("add --exclude-uid with the user that the agent runs as, or --exclude-mark with the mark of its sockets", "the agent's own connections would be captured, too")
	case len(r.UIDs) > 0 && len(r.Cgroups) == 0 && !slices.ContainsFunc(r.UIDs, func(uid uint32) bool { return !slices.Contains(r.ExceptUIDs, uid) }):
		return nil, usageError("leave one of them out", "nothing is captured: every user of --uid is one of --exclude-uid")
	case len(r.Interfaces) > 0 && len(r.CIDRs) == 0 && !r.All:
		return nil, usageError("add --cidr, --vips or --all", "--interface is about destinations, and none is given")
	}
	return r, nil
}

// parseRange parses an address or a range.
func parseRange(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		if a.Zone() != "" || a.Is4In6() {
			return netip.Prefix{}, errors.New("not an address that can be captured")
		}
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	switch {
	case err != nil:
		return netip.Prefix{}, errors.New("neither an address nor a range")
	case p.Addr().Is4In6():
		return netip.Prefix{}, errors.New("not a range that can be captured")
	case p != p.Masked():
		return netip.Prefix{}, fmt.Errorf("the range is %s", p.Masked())
	}
	return p, nil
}

// maxListed is how many lines a file of addresses may have.
const maxListed = 1 << 20

// readRanges reads a file of addresses and ranges, one a line, with comments after "#".
func readRanges(path string, stdin io.Reader) ([]netip.Prefix, error) {
	from := stdin
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return nil, usage(noSuchFile(err))
		}
		defer f.Close()
		from = f
	}
	var all []netip.Prefix
	number := 0
	lines := bufio.NewScanner(from)
	for lines.Scan() {
		if number++; number > maxListed {
			return nil, usageError("list ranges", "--vips: the file has more than %d lines", maxListed)
		}
		text, _, _ := strings.Cut(lines.Text(), "#")
		if text = strings.TrimSpace(text); text == "" {
			continue
		}
		p, err := parseRange(text)
		if err != nil {
			return nil, usageError("write an address or a range on each line", "--vips: line %d: %q: %w", number, text, err)
		}
		all = append(all, p)
	}
	if err := lines.Err(); err != nil {
		return nil, usage(fmt.Errorf("--vips: line %d: %w", number+1, err))
	}
	if len(all) == 0 {
		return nil, usageError("write an address or a range on each line", "--vips: the file has no address")
	}
	return all, nil
}

// printCaptures prints captures for people.
func printCaptures(w io.Writer, all []capture.Status) error {
	var b strings.Builder
	for i := range all {
		if i > 0 {
			b.WriteByte('\n')
		}
		printCapture(&b, &all[i])
	}
	if len(all) == 0 {
		b.WriteString("nothing is captured in this network namespace\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func printCapture(b *strings.Builder, s *capture.Status) {
	line := func(what, format string, args ...any) {
		fmt.Fprintf(b, "%-10s %s\n", what+":", printable(fmt.Sprintf(format, args...)))
	}
	down := "culvert capture down"
	if s.Name != "" {
		down += " --name " + s.Name
	}
	switch o := s.Owner; {
	case o == nil:
		line("table", "inet %s, which stays until %q", s.Table, down)
	case o.PID == 0:
		line("table", "inet %s, which a running process has", s.Table)
	default:
		line("table", "inet %s, which process %d (%s) has", s.Table, o.PID, cmp.Or(o.Program, "?"))
	}
	to := "every address"
	if !s.All {
		to = few(slices.Concat(s.VIPs, s.CIDRs), "no address")
	}
	line("captured", "TCP to %s, by %s", to, programs(s))
	if len(s.Interfaces) > 0 {
		line("routed", "the same, of others, by %s", strings.Join(s.Interfaces, ", "))
	}
	if s.TransparentPort != 0 {
		line("routed", "the same, of others, to port %d", s.TransparentPort)
	}
	if s.DNSPort != 0 {
		line("dns", "to port %d", s.DNSPort)
	}
	except := []string{"addresses of this host"}
	if len(s.ExceptCIDRs) > 0 {
		except = append(except, few(s.ExceptCIDRs, ""))
	}
	if len(s.ExceptUIDs) > 0 {
		except = append(except, users(s.ExceptUIDs))
	}
	if s.ExceptMark != 0 {
		except = append(except, fmt.Sprintf("sockets with the mark %#x", s.ExceptMark))
	}
	line("except", "%s", strings.Join(except, "; "))
	line("to", "port %d of 127.0.0.1 and ::1", s.Port)
	switch {
	case !s.ListensIPv4 && !s.ListensIPv6:
		line("problem", "no program listens at port %d: what is captured is refused", s.Port)
	case !s.ListensIPv6:
		line("problem", "no program listens at [::1]:%d: what is captured of IPv6 is refused", s.Port)
	case !s.ListensIPv4:
		line("problem", "no program listens at 127.0.0.1:%d: what is captured of IPv4 is refused", s.Port)
	}
}

// programs says whose connections are captured.
func programs(s *capture.Status) string {
	var all []string
	if len(s.UIDs) > 0 {
		all = append(all, users(s.UIDs))
	}
	if len(s.Cgroups) > 0 {
		all = append(all, "programs in the cgroup "+few(s.Cgroups, ""))
	}
	if len(all) == 0 {
		return "all programs"
	}
	return strings.Join(all, ", or ")
}

// users says which users' programs are meant.
func users(uids []uint32) string {
	var all []string
	for _, uid := range uids {
		all = append(all, strconv.FormatUint(uint64(uid), 10))
	}
	return "programs of user " + few(all, "")
}

// few lists the first of many, or says none.
func few(list []string, none string) string {
	const most = 8
	switch {
	case len(list) == 0:
		return none
	case len(list) > most:
		return fmt.Sprintf("%s and %d more", strings.Join(list[:most], ", "), len(list)-most)
	}
	return strings.Join(list, ", ")
}
